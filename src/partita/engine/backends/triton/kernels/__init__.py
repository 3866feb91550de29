"""Functions that Triton compiles: nothing here is imported until a GPU tensor asks, or the interpreter is on."""
