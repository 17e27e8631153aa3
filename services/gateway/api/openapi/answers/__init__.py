"""What is answered, as types: for the API's document and for the tests that hold answers to it."""
