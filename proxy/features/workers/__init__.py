"""Several serving processes behind one port: the parent that starts them, and their messages to each other."""
