"""How one service calls another: typed calls that raise our own errors."""
