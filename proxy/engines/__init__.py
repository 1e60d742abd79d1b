"""The engines: processes reached over HTTP."""
