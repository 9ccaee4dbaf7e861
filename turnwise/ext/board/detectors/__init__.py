"""What can be wrong with a training, one function each: bursts, episodes, learning and rewards."""
