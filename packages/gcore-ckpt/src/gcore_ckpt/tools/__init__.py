"""The `gcore-ckpt` command, and conversions from and to other libraries' formats."""
