"""The files of a step: index, data files, checksums, and how state trees are encoded."""
