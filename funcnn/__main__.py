"""`python -m funcnn`: the version and the engines."""

from funcnn import __version__, engines


def main() -> None:
    """Print one line for each engine: whether it can run, what it rests on, or why not."""
    print(f"funcnn {__version__}")
    for name, info in engines().items():
        print(f"{name:6} {'available' if info.available else 'missing  '}  {info.version or info.reason}")


if __name__ == "__main__":
    main()
