// Until version 0.1 the reference of all routes was at /docs. A link to a route, such as
// /docs#post_v1_chat_completions, leads to it at its new address.
if (/^#(get|post|put|patch|delete)_/.test(location.hash) && !document.getElementById(location.hash.slice(1))) {
  location.replace(new URL("../reference" + location.hash, document.baseURI));
}
