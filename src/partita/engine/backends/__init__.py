"""What computes a pass: each backend is a module, or a folder, of its own."""
