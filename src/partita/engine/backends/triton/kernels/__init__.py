"""Functions that Triton compiles: nothing here is imported until a GPU tensor is served, or the interpreter is on."""
