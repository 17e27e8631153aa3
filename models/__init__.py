"""The models that ship with Penstock, and the recipe that makes them."""
