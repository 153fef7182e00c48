"""A run on a Ray cluster: controllers, engines and training ranks are actors, and the bytes go between these."""

# Before Ray itself: it sets what Ray reads on import, and says which extra is missing.
from gcore_controller.runtimes import ray as ray
