"""What the suite promises, each promise as a check on a running suite; `polyphase demo` and the e2e tests run them."""
