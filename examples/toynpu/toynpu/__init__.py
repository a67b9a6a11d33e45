"""A make-believe chip for JAX; its device node is a file that TOYNPU_NODE names."""
