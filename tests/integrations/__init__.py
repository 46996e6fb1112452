"""Other packages beside Shoal. Each test skips where its package is absent and says how to install it."""
