"""What a layer computes, each with a plain torch twin."""
