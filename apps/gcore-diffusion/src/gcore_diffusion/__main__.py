"""``python -m gcore_diffusion`` is the command `gcore-diffusion`."""

from gcore_diffusion.cli import main

if __name__ == "__main__":
    main()
