"""What the plug-in mends and adds in vLLM, one after another; `register` of each module changes vLLM's classes.

The modules are imported where the plug-in is registered: other processes read some of them without vLLM or torch.
"""

FEATURES = ("reasons", "cpu_kernels", "seeds", "unread", "adapters", "supports", "images")
