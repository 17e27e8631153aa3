"""What each endpoint of the REST API takes and answers, by what they are about."""
