"""The parts of a run on Ray that come from other packages than gcore-controller: engines, placement, and settings."""
