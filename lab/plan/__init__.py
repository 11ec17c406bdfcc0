"""`polyphase plan`."""
