"""The part live: real runs on Ray whose load moves from one role to the other, under every strategy of placement."""
