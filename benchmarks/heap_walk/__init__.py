"""What a process of `polyphase bench growth` imports at its start: see `sitecustomize`."""
