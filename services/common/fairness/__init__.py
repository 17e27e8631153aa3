"""Places, threads and room that tenants share."""
