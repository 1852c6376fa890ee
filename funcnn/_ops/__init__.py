"""The trios by families; `funcnn.ops` re-exports them."""
