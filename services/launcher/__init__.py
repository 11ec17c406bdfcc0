"""The `polyphase` command: starts and supervises the suite from one cluster file."""
