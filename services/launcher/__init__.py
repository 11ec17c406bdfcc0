"""The `polyphase` command: starts, supervises, shows and changes a suite that one cluster file defines."""
