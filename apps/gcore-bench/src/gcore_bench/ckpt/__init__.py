"""Saves and loads of one state under gcore-ckpt and its peers, beside what the memory and the disk can do."""
