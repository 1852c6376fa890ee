"""The layers by families; `funcnn.layers` re-exports them."""
