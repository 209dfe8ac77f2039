"""The demo: real images without an account, the plain model and the every-token model, side by side."""
