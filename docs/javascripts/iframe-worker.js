// Pages that are opened as files may not start workers, in which Material searches. There a worker is a hidden frame:
// it runs the same script, gets messages by the same event, and passes its own to the page that made it.
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => this.#run(inside, each)), Promise.resolve())
      this.#started = this.#run(inside, url)
      this.#inside = inside
    }

    #started
    #inside

    async postMessage(data) {
      await this.#started
      this.#inside.dispatchEvent(new MessageEvent("message", { data }))
    }

    #run(inside, url) {
      return new Promise((done, failed) => {
        const script = inside.document.createElement("script")
        Object.assign(script, { src: url, onload: done, onerror: failed })
        inside.document.body.append(script)
      })
    }
  }
