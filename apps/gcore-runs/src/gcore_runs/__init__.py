"""What the runs of all apps have in common: settings, folder, logs, metrics, display and report."""
