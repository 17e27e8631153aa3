"""The REST API, described: what each path takes and answers, as an OpenAPI document and a page."""
