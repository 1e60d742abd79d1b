"""One wire format a module: from the client's words to a canonical call, and from the engine's reply back."""
