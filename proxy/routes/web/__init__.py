"""The page's own files, as they are sent to a browser: no build step, no file from another server."""
