"""Your own functions as rewards, and the processes they run in."""
