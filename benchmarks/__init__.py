"""`polyphase bench …` (one module per command), fault injection, paper reproductions, the demo, deployment checks."""
