// The search reads ~ ^ : * \ + - as a language of its own, and warns on the console about half a sentence of it, as in
// n^x or a~b. People type words and formulas: what is no word, inside or before one, is a space.
"use strict";
{
  const QUERY = 2; // the theme's number for a question to its worker
  const Plain = window.Worker;
  window.Worker = class extends Plain {
    postMessage(message, ...rest) {
      const asked = message?.type === QUERY && typeof message.data === "string";
      super.postMessage(asked ? { ...message, data: words(message.data) } : message, ...rest);
    }
  };
  function words(text) {
    return text.replace(/[~^:*\\]+/g, " ").replace(/(^|[\s"])[+-]+/g, "$1");
  }
}
