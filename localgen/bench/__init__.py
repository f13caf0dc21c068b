"""`localgen bench`: what a server delivers, measured at its client."""
