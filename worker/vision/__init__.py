"""Images: their encoder, which transformers computes, and the rows that it makes of them."""
