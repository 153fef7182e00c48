"""What trainers of all backends share."""
