"""Plan the cells of a portability matrix, run them in processes of their own, and record what happened."""


def version() -> str:
    """The version of this tool; `0+unknown` in a checkout that is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version("portmatrix")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
