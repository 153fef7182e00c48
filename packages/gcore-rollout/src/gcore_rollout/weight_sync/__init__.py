"""How new weights travel to engines, and how they are checked there."""
