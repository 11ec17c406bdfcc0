"""`polyphase calibrate`: constants of the cost model from operator tables, or from a running suite."""
