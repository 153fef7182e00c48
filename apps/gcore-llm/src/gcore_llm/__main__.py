"""``python -m gcore_llm`` is the command `gcore-llm`."""

from gcore_llm.cli import main

if __name__ == "__main__":
    main()
