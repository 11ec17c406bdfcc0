"""What `polyphase bench …` measures."""
