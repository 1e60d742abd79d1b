"""vLLM: its routes, its request fields and its replies, behind the interface of `proxy.engines.engine`."""
