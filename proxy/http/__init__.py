"""HTTP as the proxy serves it: connections with limits, bodies that are checked before they are decoded, and errors."""
