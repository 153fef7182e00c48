"""The part oracles of the bench of placement: steps published by other systems, and the predictions for them."""
