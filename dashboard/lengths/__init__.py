"""The predictor of output lengths."""
