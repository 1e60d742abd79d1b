"""The plug-in that vLLM loads in each of its processes: what it registers and mends there.

The entry point is `vllm.general_plugins`. The package registers a backend for vLLM's weight transfer: `weight_engine`
is the part inside vLLM, `receiver` receives and checks a version, `channel` carries its bytes over a process group of
torch's, and the trainer sends with it. `features` has the rest, a module each. `upstream` says which releases of vLLM
all of this fits.
"""

from __future__ import annotations

import functools
import importlib

from turnwise.engine_plugin import upstream
from turnwise.engine_plugin.features import FEATURES

BACKEND = "turnwise"
"""Name of the backend: `--weight-transfer-config '{"backend": "turnwise"}'`."""
PLUGIN_GROUP = "vllm.general_plugins"


@functools.cache
def register() -> None:
    """Register the backend, and let the features of the plug-in change vLLM.

    vLLM calls this in each of its processes, sometimes more than once; the first call counts.

    Raises:
        RuntimeError: vLLM is outside of the range that the plug-in fits; the engine does not start.
    """
    from vllm.version import __version__

    if (problem := upstream.refusal(__version__)) is not None:
        raise RuntimeError(problem)

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name in FEATURES:
        importlib.import_module(f"{__name__}.features.{name}").register()
    WeightTransferEngineFactory.register_engine(BACKEND, "turnwise.engine_plugin.weight_engine", "TurnwiseWeights")
