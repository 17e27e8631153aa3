"""A checkpoint's files, as every service that opens one reads them."""
