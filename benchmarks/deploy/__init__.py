"""The same suite in other ways than `polyphase up` alone, really brought up and put through what may happen to it."""
