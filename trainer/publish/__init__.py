"""Policy versions on disk, and how engines get them."""
