"""Plan the cells of a portability matrix, run them in processes of their own, and record what happened."""
